import torch
from sparse_losses.kernels.regularisers import regularisers
def sample(dtype):
    for B, V in ((512, 1002), (2, 250002), (2, 1<<20)):
        S=256
        x=torch.zeros(B,V,dtype=dtype)
        ids=torch.randint(0,V,(B,S)); att=torch.rand(B,S)<.8
        idf=torch.rand(V); price=torch.rand(V); counts=torch.randint(0,4,(B,))
        ign=torch.zeros(V,dtype=torch.bool)
        hid=torch.zeros(V,dtype=torch.bool)
        for unb in (False,True):
            regularisers([True,False],x,None,weights=[1.,1.,1.,1.],is_sum=[False]*4,idf=idf,beta=.3,unbiased=unb,hidden=hid,counts=counts,top_k=5,threshold=5.,price=price,ids=ids,attended=att,ignored=ign,balanced=True)
        regularisers([True,False],x,None,weights=[0.,1.,0.,1.],is_sum=[False]*4,idf=None,counts=counts,top_k=5,threshold=5.,ids=ids,attended=att,balanced=False)
        regularisers([True,False],x,None,weights=[1.,1.,1.,0.],is_sum=[False]*4,idf=idf,price=price,counts=counts,top_k=32,threshold=5.,ids=ids,attended=att,balanced=False)
